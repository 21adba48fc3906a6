"""Parity checks: a sharded run against one process, with a diagnosis of what differs."""

from megatron_fsdp.doctor.parity import check_parity
from megatron_fsdp.doctor.report import Difference, ParityReport, RunReport

__all__ = ["Difference", "ParityReport", "RunReport", "check_parity"]
