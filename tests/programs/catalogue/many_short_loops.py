# promises: conditions.1

# %% rollouts_of_a_policy: SAME stop=34 kill=34
run = unisono.Run(m := net(), Adam(m.parameters(), 0.01), shards=6, directory=DIR)
for i in range(14):
    with torch.no_grad():
        actions = m(X[:32]).argmax(1)
    rollout = TensorDataset(X[:32], actions, (actions == Y[:32]).float())
    for step in run.steps(rollout, batch_size=32, steps=3 * (i + 1)):
        with step:
            for x, action, reward in step.shards:
                chosen = m(x).log_softmax(1).gather(1, action[:, None])[:, 0]
                step.backward(-(chosen * (reward - 0.5)).mean())

# %% rate_by_the_number_of_the_loop: SAME stop=34 kill=34
run = unisono.Run(m := net(), optimizer := SGD(m.parameters(), 0.1), shards=6, directory=DIR)
for round in range(14):
    optimizer.param_groups[0]["lr"] = 0.1 / (1 + round)
    for step in run.steps(data, batch_size=32, steps=3 * round + 3):
        with step:
            for batch in step.shards:
                step.backward(loss(m, batch) * (1 + 0.1 * round))

# %% fits_with_a_growing_set: SAME stop=34 kill=34
t = trainer(m := net())
for round in range(12):
    t.fit(torch.utils.data.Subset(data, range(32 + 4 * round)), batch_size=12, epochs=round + 1)
result = t.evaluate(data, batch_size=32)["loss"]

# %% evaluated_between_loops: SAME stop=34 kill=34
t = trainer(m := net())
best = 9.0
for round in range(14):
    t.fit(data, batch_size=32, steps=3 * round + 3)
    found = t.evaluate(data, batch_size=48)["loss"]
    if found > 0.9 * best:
        t.run.optimizer.param_groups[0]["lr"] *= 0.9
    best = min(best, found)
result = best
