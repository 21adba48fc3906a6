"""One training step: the scheduler (pure), its executor, hooks, units, parameter groups, gradients and their memory."""
