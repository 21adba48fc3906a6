"""The `mfsdp` command line: parses arguments, prints results and returns exit codes."""
