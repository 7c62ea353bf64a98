"""A language model whose loss is a mean over the tokens of all ranks; batches are padded."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

PAD = -100


class Sentences(Dataset):
    def __init__(self, length):
        generator = torch.Generator().manual_seed(3)
        sizes = torch.randint(2, 12, (length,), generator=generator)
        self.rows = [torch.randint(0, 20, (int(n),), generator=generator) for n in sizes]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def collate(rows):
    tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=0)
    targets = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
    return tokens[:, :-1], targets[:, 1:]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.dropout = nn.Dropout(0.1)
        self.rnn = nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, 20)

    def forward(self, tokens):
        return self.head(self.rnn(self.dropout(self.embedding(tokens)))[0])


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = Sentences(64)
    sampler = DistributedSampler(data, seed=5)
    loader = DataLoader(data, batch_size=4, sampler=sampler, collate_fn=collate)
    model = DDP(Model())
    torch.manual_seed(1000 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for tokens, targets in loader:
            num_tokens = (targets != PAD).sum()
            dist.all_reduce(num_tokens)
            logits = model(tokens)
            total = F.cross_entropy(
                logits.flatten(0, 1), targets.flatten(), ignore_index=PAD, reduction="sum"
            )
            loss = total * world_size / num_tokens
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
