"""The metrics server of Steptron: receives what the processes of a run measure, reduces, stores and shows it.

Imports neither torch nor steptron, so that any trainer can feed it.
"""
