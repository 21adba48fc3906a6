"""The `mfsdp` command: arguments in, exit codes and text out; the work is done in the layers below."""
