"""A model of tokens in double precision, and rows with very uneven numbers of labels."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import Dataset

WORDS, LENGTH = 11, 7


class Tagger(nn.Module):
    """Tells a class per token; takes what its loss is divided by."""

    def __init__(self, seed=0):
        super().__init__()
        self.embed = nn.Embedding(WORDS, 6, dtype=torch.float64)
        self.head = nn.Linear(6, WORDS, dtype=torch.float64)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for one in self.parameters():
                one.copy_(torch.randn(one.shape, generator=generator, dtype=torch.float64) * 0.5)

    def get_input_embeddings(self):
        return self.embed

    def forward(self, input_ids, labels=None, num_items_in_batch=None):
        logits = self.head(torch.tanh(self.embed(input_ids)))
        if labels is None:
            return {"logits": logits}
        total = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        count = (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
        return {"loss": total / count, "logits": logits}


class Mean(Tagger):
    """The same with a loss of its own that is a mean over the batch, as most plain models have."""

    def forward(self, input_ids, labels=None):
        return super().forward(input_ids, labels)


class Sentences(Dataset):
    """Row i has labels on its first i % 7 + 1 tokens; the others are ignored."""

    def __init__(self, size=20):
        generator = torch.Generator().manual_seed(3)
        self.ids = torch.randint(0, WORDS, (size, LENGTH), generator=generator)
        self.labels = torch.randint(0, WORDS, (size, LENGTH), generator=generator)
        for row in range(size):
            self.labels[row, row % LENGTH + 1 :] = -100

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.labels[index]}
