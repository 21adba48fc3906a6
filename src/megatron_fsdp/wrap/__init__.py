"""What happens once: a model is checked, its units are found and sharded, hooks are registered."""
