"""Federated algorithms, one file per family."""

from fedbraid.algorithms._apfl import apfl
from fedbraid.algorithms._ditto import ditto
from fedbraid.algorithms._fair import afl, q_fedavg
from fedbraid.algorithms._fedac import fedac
from fedbraid.algorithms._fedacg import fedacg
from fedbraid.algorithms._fedala import fedala
from fedbraid.algorithms._fedauto import fedauto
from fedbraid.algorithms._fedauto_ahead import fedauto_ahead
from fedbraid.algorithms._fedbabu import fedbabu
from fedbraid.algorithms._fedbn import fedbn
from fedbraid.algorithms._fedcm import fedcm
from fedbraid.algorithms._feddc import feddc
from fedbraid.algorithms._feddog import feddog
from fedbraid.algorithms._feddyn import feddyn
from fedbraid.algorithms._fednova import fednova
from fedbraid.algorithms._fedper import fedper
from fedbraid.algorithms._fedproto import fedproto
from fedbraid.algorithms._fedrep import fedrep
from fedbraid.algorithms._fedrod import fedrod
from fedbraid.algorithms._fedsam import fedsam, mofedsam
from fedbraid.algorithms._fedspeed import fedspeed
from fedbraid.algorithms._fedsplit import fedgd, fedprox_exact, fedsplit
from fedbraid.algorithms._flexlora import flexlora
from fedbraid.algorithms._ifca import ifca
from fedbraid.algorithms._lg_fedavg import lg_fedavg
from fedbraid.algorithms._local_only import local_only
from fedbraid.algorithms._local_update import (
    diloco,
    fedadagrad,
    fedadam,
    fedavg,
    fedavgm,
    fedopt,
    fedprox,
    fedsgd,
    fedyogi,
    fomaml,
    local_update,
    lookahead,
    meta_minibatch_prox,
    minibatch_sgd,
    reptile,
)
from fedbraid.algorithms._maml import maml
from fedbraid.algorithms._mime import locmime, mime, mimelite
from fedbraid.algorithms._moon import moon
from fedbraid.algorithms._mvr import mime_mvr, mimelite_mvr, server_only_mvr
from fedbraid.algorithms._pfedme import pfedme
from fedbraid.algorithms._pfnm import pfnm
from fedbraid.algorithms._scaffold import scaffold
from fedbraid.algorithms._self_tuning import delta_sgd, fedexp, fedhyper
from fedbraid.algorithms._server_only import server_only
from fedbraid.core import Algorithm
from fedbraid.names import Names

__all__ = [
    "afl",
    "apfl",
    "delta_sgd",
    "diloco",
    "ditto",
    "fedac",
    "fedacg",
    "fedadagrad",
    "fedadam",
    "fedala",
    "fedauto",
    "fedauto_ahead",
    "fedavg",
    "fedavgm",
    "fedbabu",
    "fedbn",
    "fedcm",
    "feddc",
    "feddog",
    "feddyn",
    "fedexp",
    "fedgd",
    "fedhyper",
    "fednova",
    "fedopt",
    "fedper",
    "fedproto",
    "fedprox",
    "fedprox_exact",
    "fedrep",
    "fedrod",
    "fedsam",
    "fedsgd",
    "fedspeed",
    "fedsplit",
    "fedyogi",
    "flexlora",
    "fomaml",
    "ifca",
    "lg_fedavg",
    "local_only",
    "local_update",
    "locmime",
    "lookahead",
    "maml",
    "meta_minibatch_prox",
    "mime",
    "mime_mvr",
    "mimelite",
    "mimelite_mvr",
    "minibatch_sgd",
    "mofedsam",
    "moon",
    "pfedme",
    "pfnm",
    "q_fedavg",
    "reptile",
    "scaffold",
    "server_only",
    "server_only_mvr",
]

ALGORITHMS = {name: globals()[name] for name in __all__}
"""Every algorithm that a configuration can name, and its factory."""

NAMES = Names("algorithm", ALGORITHMS, Algorithm, without="alg")
"""Those, the algorithms of installed packages, and ``module:attribute``."""
