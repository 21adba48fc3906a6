"""Why a run hangs: the logs of all ranks, read together, and the odd one out."""
