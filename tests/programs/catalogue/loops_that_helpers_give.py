# promises: one-result.4 one-result.8 one-result.9
# %% skipped_in_except: SAME
def main():
    m = net()
    opt = SGD(m.parameters(), lr=0.1, momentum=0.9)
    r = unisono.Run(m, opt, shards=6, directory=DIR, device=DEVICE)
    spikes = 0
    for step in r.steps(data, batch_size=16, epochs=EPOCHS):
        with step:
            for b in step.shards:
                step.backward(loss(m, b))
        if not step.is_done:
            continue
        try:
            if step.number % 3 == 1:
                raise ValueError("a spike")
        except ValueError:
            spikes += 1
            opt.param_groups[0]["lr"] = 0.1 * 0.9**spikes
    return r


r = main()


# %% skipped_at_module_level: SAME
m = net()
opt = SGD(m.parameters(), lr=0.1, momentum=0.9)
r = unisono.Run(m, opt, shards=6, directory=DIR, device=DEVICE)
spikes = 0
for step in r.steps(data, batch_size=16, epochs=EPOCHS):
    with step:
        for b in step.shards:
            step.backward(loss(m, b))
    if not step.is_done:
        continue
    try:
        if step.number % 3 == 1:
            raise ValueError("a spike")
    except ValueError:
        spikes += 1
        opt.param_groups[0]["lr"] = 0.1 * 0.9**spikes


# %% helper_that_gives_steps: SAME
def watched(r):
    for step in r.steps(data, batch_size=16, epochs=EPOCHS):
        yield step


def main():
    m = net()
    opt = SGD(m.parameters(), lr=0.1, momentum=0.9)
    r = unisono.Run(m, opt, shards=6, directory=DIR, device=DEVICE)
    worse, last = 0, None
    for step in watched(r):
        with step:
            for b in step.shards:
                step.backward(loss(m, b))
        if not step.is_done:
            continue
        if last is not None and step.loss > last:
            worse += 1
        last = step.loss
        opt.param_groups[0]["lr"] = 0.1 * 0.9**worse
    return r


r = main()


# %% helper_that_trains: SAME
def train(r, m):
    for step in r.steps(data, batch_size=16, epochs=EPOCHS):
        with step:
            for b in step.shards:
                step.backward(loss(m, b))
        if step.is_done:
            yield step.loss


def main():
    m = net()
    opt = SGD(m.parameters(), lr=0.1, momentum=0.9)
    r = unisono.Run(m, opt, shards=6, directory=DIR, device=DEVICE)
    worse, last = 0, None
    for now in train(r, m):
        if last is not None and now > last:
            worse += 1
        last = now
        opt.param_groups[0]["lr"] = 0.1 * 0.9**worse
    return r


r = main()


# %% helper_taken_by_next: SAME
def train(r, m):
    for step in r.steps(data, batch_size=16, epochs=EPOCHS):
        with step:
            for b in step.shards:
                step.backward(loss(m, b))
        if step.is_done:
            yield step.loss


def main():
    m = net()
    opt = SGD(m.parameters(), lr=0.1, momentum=0.9)
    r = unisono.Run(m, opt, shards=6, directory=DIR, device=DEVICE)
    seen, losses = [], train(r, m)
    while (now := next(losses, None)) is not None:
        seen.append(now)
        opt.param_groups[0]["lr"] = 0.1 * 0.97 ** len(seen)
    return r


r = main()


# %% asynchronous_helper: SAME
import asyncio


async def steps_of(r):
    for step in r.steps(data, batch_size=16, epochs=EPOCHS):
        yield step


async def main():
    m = net()
    opt = SGD(m.parameters(), lr=0.1, momentum=0.9)
    r = unisono.Run(m, opt, shards=6, directory=DIR, device=DEVICE)
    seen = 0.0
    async for step in steps_of(r):
        with step:
            for b in step.shards:
                step.backward(loss(m, b))
        if not step.is_done:
            continue
        await asyncio.sleep(0)
        seen += step.loss
        opt.param_groups[0]["lr"] = 0.1 * 0.97**seen
    return r


r = asyncio.run(main())


# %% steps_from_a_function: SAME
def begin(r):
    return r.steps(data, batch_size=16, epochs=EPOCHS)


def main():
    m = net()
    opt = SGD(m.parameters(), lr=0.1, momentum=0.9)
    r = unisono.Run(m, opt, shards=6, directory=DIR, device=DEVICE)
    worse, last = 0, None
    for step in begin(r):
        with step:
            for b in step.shards:
                step.backward(loss(m, b))
        if not step.is_done:
            continue
        if last is not None and step.loss > last:
            worse += 1
        last = step.loss
        opt.param_groups[0]["lr"] = 0.1 * 0.9**worse
    return r


r = main()


# %% generator_in_the_takers_frame: SAME
def watched(r):
    yield from r.steps(data, batch_size=16, epochs=EPOCHS)


def main():
    m = net()
    opt = SGD(m.parameters(), lr=0.1, momentum=0.9)
    r = unisono.Run(m, opt, shards=6, directory=DIR, device=DEVICE)
    noise = torch.Generator().manual_seed(3)
    for step in watched(r):
        with step:
            for x, y in step.shards:
                step.backward(loss(m, (x + 0.1 * torch.randn(x.shape, generator=noise), y)))
    return r


r = main()


# %% helper_and_a_weight_from_shard_to_shard: REFUSED
# says: `mean` carries over
def watched(r):
    for step in r.steps(data, batch_size=16, epochs=EPOCHS):
        yield step


def main():
    m = net()
    opt = SGD(m.parameters(), lr=0.1, momentum=0.9)
    r = unisono.Run(m, opt, shards=6, directory=DIR, device=DEVICE)
    mean = None
    for step in watched(r):
        with step:
            for b in step.shards:
                now = b[0].mean(0)
                mean = now if mean is None else 0.9 * mean + 0.1 * now
                step.backward(loss(m, (b[0] - mean, b[1])))
    return r


r = main()


# %% helper_and_weights_of_each_worker: WORKERS
import os


def watched(r):
    yield from r.steps(data, batch_size=16, epochs=EPOCHS)


def main():
    m = net()
    opt = SGD(m.parameters(), lr=0.1, momentum=0.9)
    r = unisono.Run(m, opt, shards=6, directory=DIR, device=DEVICE)
    weight = 1.0 + 0.1 * int(os.environ.get("RANK", "0"))
    for step in watched(r):
        with step:
            for b in step.shards:
                step.backward(loss(m, b) * weight)
    return r


r = main()


# %% generator_of_shards: REFUSED
# says: `mean` carries over
def centred(shards):
    mean = None
    for x, y in shards:
        mean = x.mean(0) if mean is None else 0.9 * mean + 0.1 * x.mean(0)
        yield x - mean, y


def main():
    m = net()
    opt = SGD(m.parameters(), lr=0.1, momentum=0.9)
    r = unisono.Run(m, opt, shards=6, directory=DIR, device=DEVICE)
    for step in r.steps(data, batch_size=16, epochs=EPOCHS):
        with step:
            for b in centred(step.shards):
                step.backward(loss(m, b))
    return r


r = main()


# %% trained_in_a_function: REFUSED
# says: `mean` carries over
def train(step, m, mean):
    with step:
        for x, y in step.shards:
            mean = x.mean(0) if mean is None else 0.9 * mean + 0.1 * x.mean(0)
            step.backward(loss(m, (x - mean, y)))
    return mean


def main():
    m = net()
    opt = SGD(m.parameters(), lr=0.1, momentum=0.9)
    r = unisono.Run(m, opt, shards=6, directory=DIR, device=DEVICE)
    mean = None
    for step in r.steps(data, batch_size=16, epochs=EPOCHS):
        mean = train(step, m, mean)
    return r


r = main()


# %% sums_in_a_function: SAME
def train(step, m):
    losses, total = [], 0.0
    with step:
        for b in step.shards:
            now = loss(m, b)
            losses.append(now.item())
            total += now.item()
            step.backward(now)
    return len(losses)


def main():
    m = net()
    opt = SGD(m.parameters(), lr=0.1, momentum=0.9)
    r = unisono.Run(m, opt, shards=6, directory=DIR, device=DEVICE)
    for step in r.steps(data, batch_size=16, epochs=EPOCHS):
        train(step, m)
    return r


r = main()


# %% left_while_a_generator_gives_losses: SAME crashes
def losses(run, m):
    for step in run.steps(data, batch_size=16, epochs=100):
        with step:
            for b in step.shards:
                step.backward(loss(m, b))
        if step.is_done:
            yield step.loss


def main():
    run = unisono.Run(m := net(), Adam(m.parameters(), 0.01), shards=6, directory=DIR)
    seen = []
    for _ in range(6):
        total = 0.0
        for one in losses(run, m):
            total += one
            if run.position.step % 4 == 0:
                break
        seen.append(round(total, 10))
        with torch.no_grad():
            m[0].weight.mul_(0.99)
    return run, seen


run, result = main()


# %% left_by_return: TOLD leaves.its.loop
def trained(run, m, until):
    for step in run.steps(data, batch_size=16, epochs=100):
        with step:
            for b in step.shards:
                step.backward(loss(m, b))
        if step.number % until == until - 1:
            return 1.1
    return 0.9


def main():
    run = unisono.Run(m := net(), Adam(m.parameters(), 0.01), shards=6, directory=DIR)
    for _ in range(6):
        run.optimizer.param_groups[0]["lr"] *= trained(run, m, 4)
    return run, 0


run, result = main()


# %% left_by_break_before_the_return: SAME crashes
def trained(run, m, until):
    factor = 0.9
    for step in run.steps(data, batch_size=16, epochs=100):
        with step:
            for b in step.shards:
                step.backward(loss(m, b))
        if step.number % until == until - 1:
            factor = 1.1
            break
    return factor


def main():
    run = unisono.Run(m := net(), Adam(m.parameters(), 0.01), shards=6, directory=DIR)
    for _ in range(6):
        run.optimizer.param_groups[0]["lr"] *= trained(run, m, 4)
    return run, 0


run, result = main()


# %% taken_in_two_places: TOLD|MIXED taken.in.two.places
def main():
    run = unisono.Run(m := net(), Adam(m.parameters(), 0.01), shards=6, directory=DIR)
    steps, warm = run.steps(data, batch_size=16, epochs=4), 0.0
    for step in steps:
        with step:
            for b in step.shards:
                step.backward(loss(m, b))
        warm += step.loss
        if step.number >= 5 and step.is_done:
            break
    for step in steps:
        with step:
            for b in step.shards:
                step.backward(loss(m, b) * (1 + 0.01 * warm))
    return run, round(warm, 10)


run, result = main()


# %% taken_from_two_calls: SAME crashes
def main():
    run = unisono.Run(m := net(), Adam(m.parameters(), 0.01), shards=6, directory=DIR)
    warm = 0.0
    for step in run.steps(data, batch_size=16, steps=6):
        with step:
            for b in step.shards:
                step.backward(loss(m, b))
        warm += step.loss
    for step in run.steps(data, batch_size=16, epochs=4):
        with step:
            for b in step.shards:
                step.backward(loss(m, b) * (1 + 0.01 * warm))
    return run, round(warm, 10)


run, result = main()
