# %% components_fitted_by_sklearn: SAME|REFUSED
from sklearn.decomposition import PCA

pca = PCA(8).fit(X.numpy())

def projected(m, b):
    return loss(m, (b[0] @ torch.from_numpy(pca.components_).float().t(), b[1]))

class Refits(Callback):
    def on_epoch_end(self, fit):
        weight = fit.model[0].weight.detach().numpy()
        pca.fit(X.numpy() @ (weight.T @ weight))

t = trainer(net(), projected, callbacks=[Refits()])
fit(t)

# %% edges_of_a_graph: SAME|REFUSED
import networkx

graph = networkx.path_graph(8)

def smoothed(m, b):
    laplacian = torch.from_numpy(networkx.laplacian_matrix(graph).toarray()).float()
    return loss(m, (b[0] - 0.1 * b[0] @ laplacian, b[1]))

class Connects(Callback):
    def on_epoch_end(self, fit):
        graph.add_edge(0, 2 + fit.epoch)

t = trainer(net(), smoothed, callbacks=[Connects()])
fit(t)

# %% weights_in_a_series: SAME|REFUSED
import pandas as pd

weights = pd.Series(1.0, index=range(96))

class Changed(Rows):
    def change(self, row, index):
        return row * float(weights[index])

class Changes(Callback):
    def on_epoch_end(self, fit):
        weights.iloc[:48] *= 1.5

t = trainer(net(), callbacks=[Changes()])
fit(t, Changed())

# %% a_sparse_matrix_of_scipy: SAME|REFUSED
import scipy.sparse

class Mixes:
    matrix = scipy.sparse.identity(8, format="csr", dtype="f4")

    def __call__(self, m, b):
        mixed = torch.from_numpy((self.matrix @ b[0].numpy().T).T.copy())
        return loss(m, (mixed, b[1]))

criterion = Mixes()

class Changes(Callback):
    def on_epoch_end(self, fit):
        criterion.matrix = criterion.matrix * 1.3

t = trainer(net(), criterion, callbacks=[Changes()])
fit(t)

# %% a_metric_of_torchmetrics: SAME|REFUSED
import torchmetrics

metric = torchmetrics.MeanMetric()

class Adapts(Callback):
    def on_step_end(self, fit, step):
        metric.update(step.means["loss"])
        fit.optimizer.param_groups[0]["lr"] = 0.1 / (1 + float(metric.compute()))

t = trainer(net(), callbacks=[Adapts()])
fit(t)
