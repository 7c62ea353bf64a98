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
class Shifted(nn.Sequential):
    def __init__(self):
        super().__init__(*normed())
        self.register_buffer("shift", torch.zeros(8))

    def forward(self, inputs):
        return super().forward(inputs + self.shift)


def on_one_rank(model, _):
    if unisono.world().rank == 0 and unisono.world().world_size > 1:
        model.shift[2] = 0.5


t = trainer(Shifted(), callbacks=[Between(on_one_rank)])
fit(t)


# %% a_buffer_replaced_by_rank: WORKERS everywhere
# says: change of shift|`shift`
class Shifted(nn.Sequential):
    def __init__(self):
        super().__init__(*normed())
        self.register_buffer("shift", torch.zeros(8))

    def forward(self, inputs):
        return super().forward(inputs + self.shift)


def by_rank(model, _):
    model.shift = model.shift + unisono.world().rank


t = trainer(Shifted(), callbacks=[Between(by_rank)])
fit(t)
