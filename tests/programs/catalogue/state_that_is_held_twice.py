# promises: one-result.4

# %% dict_that_a_callback_reads: SAME
m = net()
stats = {"last": 0.0, "rates": []}


class Adapts(Callback):
    def on_step_end(self, fit, step):
        stats["rates"].append(0.1 / (1 + 0.1 * abs(stats["last"] - step.means["loss"])))
        stats["last"] = step.means["loss"]

    def on_step_begin(self, fit):
        if stats["rates"]:
            fit.optimizer.param_groups[0]["lr"] = sum(stats["rates"]) / len(stats["rates"])


t = trainer(m, callbacks=[Adapts()])
t.run.state["stats"] = stats
fit(t)

# %% tensor_changed_in_place: SAME
center = torch.zeros(2)


def centred(m, b):
    return F.cross_entropy(m(b[0]) - center, b[1])


class Moves(Callback):
    def on_step_end(self, fit, step):
        center.mul_(0.9).add_(fit.model[2].bias.detach(), alpha=0.5)


t = trainer(net(), centred, callbacks=[Moves()])
t.run.state["center"] = center
fit(t)


# %% inner_list_held_by_an_object: SAME
class Record:
    def __init__(self, losses):
        self.losses = losses


run = unisono.Run(m := net(), SGD(m.parameters(), 0.1), shards=6, directory=DIR)
run.state["history"] = {"losses": {"train": []}}
record = Record(run.state["history"]["losses"]["train"])
for step in run.steps(data, batch_size=16, epochs=4):
    with step:
        weight = 1 + 0.01 * sum(record.losses)
        for batch in step.shards:
            step.backward(weight * loss(m, batch))
    record.losses.append(step.loss)

# %% two_names_for_one_dict: SAME
run = unisono.Run(m := net(), SGD(m.parameters(), 0.1), shards=6, directory=DIR)
run.state["slow"] = run.state["fast"] = {"sum": 0.0}
for step in run.steps(data, batch_size=16, epochs=4):
    with step:
        for batch in step.shards:
            step.backward(loss(m, batch) * (1 + run.state["slow"]["sum"]))
    run.state["fast"]["sum"] += 0.1 * step.loss


# %% default_of_a_function: SAME
def weighed(m, b, weights=[1.0, 1.0]):
    return F.cross_entropy(m(b[0]), b[1], weight=torch.tensor(weights))


class Shifts(Callback):
    def on_step_end(self, fit, step):
        fit_state = t.run.state["weights"]
        fit_state[step.number % 2] += 0.1 * step.means["loss"]


t = trainer(net(), weighed, callbacks=[Shifts()])
t.run.state["weights"] = weighed.__defaults__[0]
fit(t)

# %% list_that_is_replaced: SAME
m = net()
run = unisono.Run(m, SGD(m.parameters(), 0.1), shards=6, directory=DIR)
run.state["losses"] = []
for step in run.steps(data, batch_size=16, epochs=4):
    with step:
        for batch in step.shards:
            step.backward(loss(m, batch))
    run.state["losses"] = [*run.state["losses"], step.loss]
result = len(run.state["losses"]), sum(run.state["losses"])
