"""Elastic agent on torch.distributed.elastic; it manages processes, not tensors."""
