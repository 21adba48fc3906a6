"""What was asked for, resolved: configuration flags, arguments of the published package, YAML, import paths."""
