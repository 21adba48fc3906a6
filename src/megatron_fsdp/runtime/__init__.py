"""What happens during training: the schedule (pure), its executor, the hooks, and the optimizer integration."""
