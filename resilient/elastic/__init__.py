"""Elastic agent that manages worker processes with the rendezvous of torch.distributed.elastic."""
