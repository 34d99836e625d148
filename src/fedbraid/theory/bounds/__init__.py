"""Published convergence bounds as objects: value, terms, assumptions, citation.

Each assumption of a bound is *checked* (this code verified it for the given numbers or federation) or *assumed* (it
could not be verified here, or the evidence contradicts it; the detail then says so). A bound is `proven` only if all
its assumptions were checked. A condition that is clearly violated (a step size outside its range) is an error that
names the range.

Evidence is given as ``evidence=``: a `QuadraticFederation`, on which all assumptions can be checked, or a `Constants`
estimated from data (`fedbraid.theory.constants`), which can contradict convexity but cannot prove it.

One module per paper: `charles_konecny`, `renard`, `elastic_aggregation`, `mime`.
"""

from fedbraid.theory.bounds.bound import Assumption, Bound
from fedbraid.theory.bounds.charles_konecny import excess_loss_bound, suboptimality_bound, trajectory_bound
from fedbraid.theory.bounds.elastic_aggregation import aggregation_bound, aggregation_lower_bound, aggregation_rate
from fedbraid.theory.bounds.mime import MIME_TABLE, mime_rounds
from fedbraid.theory.bounds.renard import drift_bound, fedavg_bound, round_progress_bound

__all__ = [
    "MIME_TABLE",
    "Assumption",
    "Bound",
    "aggregation_bound",
    "aggregation_lower_bound",
    "aggregation_rate",
    "drift_bound",
    "excess_loss_bound",
    "fedavg_bound",
    "mime_rounds",
    "round_progress_bound",
    "suboptimality_bound",
    "trajectory_bound",
]
