"""Memory that CPU ranks of one host share."""
