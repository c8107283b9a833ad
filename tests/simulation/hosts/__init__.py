"""Several hosts' agents and their rendezvous, in virtual time (ADR 0048).

The agents are the library's own, and the rendezvous is torch's: what is simulated is time, the
network with a store, and the processes of the ranks.
"""
