"""Findings of the Step 3.5 Flash report, made again in small."""
