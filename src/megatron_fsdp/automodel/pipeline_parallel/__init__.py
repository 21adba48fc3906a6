"""Pipeline parallelism of Hugging Face decoders by torch.distributed.pipelining."""
