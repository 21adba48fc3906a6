"""Parity checks: a sharded run against one process, and a diagnosis of differences."""

from megatron_fsdp.doctor.parity import check_parity
from megatron_fsdp.doctor.report import Difference, ParityReport, RunReport

__all__ = ["Difference", "ParityReport", "RunReport", "check_parity"]
