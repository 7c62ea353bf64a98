# promises: one-result.4

# %% weight_by_the_loss_before: SAME|REFUSED
run = unisono.Run(m := net(), SGD(m.parameters(), 0.1), shards=6, directory=DIR)
weight = 1.0
for step in run.steps(data, batch_size=16, epochs=4):
    with step:
        for batch in step.shards:
            step.backward(weight * loss(m, batch))
    weight = 0.5 * weight + step.loss


# %% center_in_a_function: SAME|REFUSED
def main():
    run = unisono.Run(m := net(), SGD(m.parameters(), 0.1), shards=6, directory=DIR)
    center = torch.zeros(2)
    for step in run.steps(data, batch_size=16, epochs=4):
        with step:
            for x, y in step.shards:
                step.backward(F.cross_entropy(m(x) - center, y))
        center = 0.9 * center + m[2].bias.detach()
    return run


run = main()

# %% last_weights_in_a_list: SAME|REFUSED
run = unisono.Run(m := net(), SGD(m.parameters(), 0.1), shards=6, directory=DIR)
past = []
for step in run.steps(data, batch_size=16, epochs=4):
    with step:
        for batch in step.shards:
            pull = sum((m[2].bias - one).square().sum() for one in past)
            step.backward(loss(m, batch) + 0.05 * pull)
    past = [*past[-2:], m[2].bias.detach().clone()]


# %% multiplier_of_a_constraint: SAME|REFUSED
class Lagrange:
    def __init__(self):
        self.multiplier = 0.0

    def train(self):
        m = net()
        run = unisono.Run(m, SGD(m.parameters(), 0.1), shards=6, directory=DIR)
        for step in run.steps(data, batch_size=16, epochs=4):
            with step:
                for batch in step.shards:
                    size = sum(p.square().sum() for p in m.parameters())
                    step.backward(loss(m, batch) + self.multiplier * size)
            size = sum(p.square().sum().item() for p in m.parameters())
            self.multiplier = max(0.0, self.multiplier + 0.001 * (size - 1))
        return run


run = Lagrange().train()

# %% stage_that_a_loop_enters: SAME|REFUSED
run = unisono.Run(m := net(), SGD(m.parameters(), 0.1), shards=6, directory=DIR)
stage, criterion, losses = "warm-up", F.mse_loss, []
for step in run.steps(data, batch_size=16, epochs=4):
    with step:
        for x, y in step.shards:
            target = F.one_hot(y, 2).float() if stage == "warm-up" else y
            step.backward(criterion(m(x), target))
    losses.append(step.loss)
    if stage == "warm-up" and step.number == 6:
        stage, criterion = "sharp", F.cross_entropy


# %% annealed_in_a_nested_function: SAME|REFUSED
def main():
    run = unisono.Run(m := net(), SGD(m.parameters(), 0.1), shards=6, directory=DIR)
    beta, seen = 0.0, 0

    def annealed(batch):
        out = m(batch[0])
        return F.cross_entropy(out, batch[1]) + beta * out.square().mean()

    for step in run.steps(data, batch_size=16, epochs=4):
        with step:
            for batch in step.shards:
                step.backward(annealed(batch))
        seen += step.num_samples if hasattr(step, "num_samples") else 16
        beta = min(1.0, seen / 200)
    return run


run = main()
