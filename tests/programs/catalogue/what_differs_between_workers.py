# promises: one-result.6

# %% momentum_by_rank: WORKERS everywhere
# says: `exp_avg/0
def by_rank(_, optimizer):
    for state in optimizer.state.values():
        state["exp_avg"].mul_(0.9 - 0.1 * unisono.world().rank)


m = normed()
t = trainer(m, optimizer=Adam(m.parameters(), 0.01), callbacks=[Between(by_rank)])
fit(t)


# %% a_bias_on_one_rank: WORKERS everywhere
# says: 4\.bias`
def on_one_rank(model, _):
    if unisono.world().rank == 1:
        model[4].bias.data.zero_()


t = trainer(normed(), callbacks=[Between(on_one_rank)])
fit(t)


# %% a_rate_of_the_rank: WORKERS everywhere
# says: an optimizer's options .* where shards \d+ and \d+ are computed
def rate_of_the_rank(_, optimizer):
    optimizer.param_groups[0]["lr"] = 0.1 + unisono.world().rank


t = trainer(normed(), callbacks=[Between(rate_of_the_rank)])
fit(t)


# %% a_buffer_written_on_one_rank: WORKERS everywhere
# says: change of shift|`shift`
def on_one_rank(model, _):
    if unisono.world().rank == 0 and unisono.world().world_size > 1:
        model.shift[2] = 0.5


t = trainer(Shifted(), callbacks=[Between(on_one_rank)])
fit(t)


# %% a_buffer_replaced_by_rank: WORKERS everywhere
# says: change of shift|`shift`
def by_rank(model, _):
    model.shift = model.shift + unisono.world().rank


t = trainer(Shifted(), callbacks=[Between(by_rank)])
fit(t)


# %% clipping_put_around_step_on_one_rank: WORKERS everywhere
# says: the model with its optimizer must be
t = trainer(normed())
step = t.run.optimizer.step
if unisono.world().rank == 0 and unisono.world().world_size > 1:
    t.run.optimizer.step = lambda closure=None: step(closure)
fit(t)


# %% evaluated_with_an_average_of_one_rank: WORKERS everywhere
# says: the digest of `model` must be the same
average = torch.optim.swa_utils.AveragedModel(normed())
t = trainer(normed())
fit(t, epochs=EPOCHS // 2)
if unisono.world().rank == 0:
    average.update_parameters(normed().to(DEVICE))
t.evaluate(data, batch_size=10, model=average)


# %% predicted_with_an_average_of_one_rank: WORKERS everywhere
# says: the digest of `model` must be the same
average = torch.optim.swa_utils.AveragedModel(normed())
t = trainer(normed())
fit(t, epochs=EPOCHS // 2)
if unisono.world().rank == 0:
    average.update_parameters(normed().to(DEVICE))
t.predict(data, batch_size=10, model=average)


# %% predicted_on_one_rank: WORKERS everywhere
# says: came to `(predict|evaluate)[^`]*` and rank
t = trainer(normed())
fit(t, epochs=EPOCHS // 2)
if unisono.world().rank == 0:
    t.predict(data, batch_size=10)
t.evaluate(data, batch_size=10)
