"""Secure aggregation over Flower's messages: four messages per exchange instead of one.

1. ``query.secure_keys``: every client of the cohort sends two public keys.
2. ``query.secure_deal``: it gets everyone's keys, and sends sealed shares of its secrets for the others.
3. ``train.<exchange>``: the exchange's own message, with the shares for this client. The answer is the masked upload.
4. ``query.secure_open``: it gets the list of uploads that arrived, and sends one share of each client's secrets.

Clients that do not answer a message are left out from then on. The cryptography is in :mod:`fedbraid.masking`.
"""
