"""The constants of your data: L, mu, sigma^2, G^2, B^2, zeta and delta at given parameters, with standard errors.

For any ``loss(params, batch, key)`` that is a mean over the examples marked by ``batch["mask"]``, and any data grouped
by client (`fedbraid.Split`). Clients are sampled. Their gradients are exact; their Hessians are used through
Hessian-vector products. Extreme eigenvalues come from ARPACK's implicitly restarted Lanczos method
(`scipy.sparse.linalg.eigsh`), which stops at a stated tolerance. Its loop runs on the host: one compiled product serves
every eigenproblem, and no convolution is inside a compiled loop. Small models (up to ``dense`` parameters) get their
full Hessians, hence exact eigenvalues.

Names and definitions, with ``f = sum_i p_i f_i`` over clients:

    L, mu        largest and smallest eigenvalue of the Hessian of f
    L_client_*   the same of single clients: they limit a local step (Charles and Konecny, Assumption 1)
    sigma2       variance of a client's gradient over its batches (Karimireddy et al., A3)
    G2           sum_i p_i ||grad f_i - grad f||^2 (Karimireddy et al., A1)
    B2           sum_i p_i ||grad f_i||^2 / ||grad f||^2 (Li et al., local dissimilarity)
    zeta         max_i ||grad f_i - grad f|| (Renard, Assumption 7)
    delta        max_i ||Hess f_i - Hess f|| (Karimireddy et al., A2, over clients)

All constants are local: they hold at these parameters, not elsewhere. A maximum over sampled clients is a lower bound
of the maximum over all clients.
"""

from fedbraid.theory.constants.curvature import Hessians
from fedbraid.theory.constants.estimation import estimate
from fedbraid.theory.constants.sampling import Clients
from fedbraid.theory.constants.table import Constants, Estimate, envelope

__all__ = ["Clients", "Constants", "Estimate", "Hessians", "envelope", "estimate"]
