"""As in torch's tutorial “Optional: Data Parallelism”, with Unisono's class in the one line."""

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

import unisono

device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


class RandomDataset(Dataset):
    def __init__(self, size, length):
        self.len = length
        self.data = torch.randn(length, size)

    def __getitem__(self, index):
        return self.data[index]

    def __len__(self):
        return self.len


class Model(nn.Module):
    def __init__(self, input_size, output_size):
        super().__init__()
        self.fc = nn.Linear(input_size, output_size)

    def forward(self, input):
        output = self.fc(input)
        print("\tIn Model: input size", input.size(), "output size", output.size())
        return output


model = unisono.DataParallel(Model(5, 2), device_ids=[0, 1])
model.to(device)
for data in DataLoader(dataset=RandomDataset(5, 100), batch_size=30, shuffle=True):
    output = model(data.to(device))
    print("Outside: input size", data.size(), "output_size", output.size())
