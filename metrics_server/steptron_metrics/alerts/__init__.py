"""Rules that watch runs, and what becomes of what they see.

``rule`` and ``loading`` say what a rule is, ``series`` and ``figures`` what it looks at, ``detector`` decides,
``watchers`` look on behalf of a rule, ``book`` keeps the alerts, ``engine`` puts these together; ``delivery``,
``webhook`` and ``requests`` bring them to people and runs.
"""
