# promises: conditions.1 conditions.6

# %% weights_in_a_file: SAME everywhere
t = trainer(normed())
fit(t, epochs=EPOCHS // 2)
if unisono.world().rank == 0:
    torch.save({name: one.cpu() for name, one in t.run.model.state_dict().items()}, "weights.pt")
fit(t)
result = hashlib.sha256(Path("weights.pt").read_bytes()).hexdigest()


# %% predictions_in_files: SAME everywhere
t = trainer(normed())
fit(t, epochs=EPOCHS // 2)
means, outputs = t.evaluate(data, batch_size=7), t.predict(data, batch_size=7)
if unisono.world().rank == 0:
    Path("means.json").write_text(json.dumps(dict(means)))
    np.save("outputs.npy", outputs.cpu().numpy())
fit(t)
result = [
    hashlib.sha256(Path(one).read_bytes()).hexdigest() for one in ("means.json", "outputs.npy")
]


# %% a_fit_with_the_default_shards: SAME everywhere kill=8 stop=6
t = trainer(normed(), shards=None)
fit(t, batch_size=32)


# %% a_loop_with_the_default_shards: SAME everywhere
m = normed()
r = unisono.Run(m, Adam(m.parameters(), 0.01), directory=DIR, device=DEVICE)
for step in r.steps(data, batch_size=32, steps=STEPS):
    with step:
        for batch in step.shards:
            step.backward(loss(m, batch))


# %% clipping_put_around_step_in_the_second_of_three_fits: SAME everywhere
t = trainer(normed())
fit(t, epochs=None, steps=STEPS // 3)
optimizer = t.run.optimizer
inner = optimizer.step


def step(closure=None):
    nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 0.1)
    inner(closure)
    optimizer.zero_grad()


optimizer.step = step
fit(t, epochs=None, steps=STEPS * 2 // 3)
result = t.digest()
optimizer.step = inner
fit(t)
