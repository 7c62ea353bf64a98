"""What shards tell beside their gradients."""

import torch

import unisono


def test_rows_of_any_length_are_read_whole():
    names = [f"a scalar with a long name, number {number}" for number in range(12)]

    def loss(model, batch):
        mean = model(batch[0]).mean()
        return {"loss": mean, **{name: float(place) for place, name in enumerate(names)}}

    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = unisono.Run(model, optimizer, shards=2)
    data = torch.utils.data.TensorDataset(torch.randn(4, 3))
    for step in run.steps(data, batch_size=4, epochs=1):
        with step:
            for batch in step.shards:
                step.backward(loss(model, batch))
    assert {name: step.means[name] for name in names} == {n: float(p) for p, n in enumerate(names)}
