"""Integrations with other trainers."""
