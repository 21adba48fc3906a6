"""Configuration: flags, arguments of the published package, YAML, import paths, and the resolved options."""
