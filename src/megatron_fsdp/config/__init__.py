"""Configuration as given and resolved: flags, arguments of the published package, YAML, import paths."""
