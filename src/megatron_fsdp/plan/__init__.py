"""What a run will need, before it runs: memory, floating point operations, traffic and time of every rank."""
