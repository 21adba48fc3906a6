"""One training step: the schedule (pure), its executor, hooks, units, parameter groups, gradients and their memory."""
