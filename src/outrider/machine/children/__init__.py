"""Programs that run in an interpreter of their own, because torch may be missing, broken or another one there.

They import nothing of Outrider. Started by detect and probes through child.script.
"""
