"""Views over a finished engine: state dicts, full tensors, names of experts, statistics."""
