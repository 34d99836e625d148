"""Secure aggregation by pairwise masks: the arithmetic and the cryptography, without messages.

The protocol is that of Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning (2017).
Client i sends x_i + PRG(b_i) + sum over j of +-PRG(s_ij), modulo a power of two. The pairwise masks cancel in the sum.
Shamir shares of b_i and of i's key restore what does not cancel when clients drop out. :mod:`fedbraid.flower.secure`
sends the messages.
"""

from fedbraid.masking.settings import Secure

__all__ = ["Secure"]
