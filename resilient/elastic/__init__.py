"""Elastic agent, which manages processes (not tensors) on torch.distributed.elastic."""
