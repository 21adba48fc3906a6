"""Name, version and provenance of this package, as literals that the build reads without an import."""

__version__ = "0.1.0"
__shortversion__ = "0.1"
__package_name__ = "megatron_fsdp"
__contact_names__ = "The contributors"
__contact_emails__ = "none; write through the forge that hosts the repository"
__homepage__ = "not published yet"
__repository_url__ = "not published yet"
__download_url__ = "not published yet"
__description__ = (
    "Fully sharded data parallelism in native PyTorch: an independent implementation of the Megatron-FSDP interface, "
    "not affiliated with NVIDIA."
)
__license__ = "Apache-2.0"
__keywords__ = "pytorch, distributed training, fsdp, zero, hsdp, sharding"
