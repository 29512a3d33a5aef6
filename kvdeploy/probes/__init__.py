"""Small programs that run inside the engines' own Python, never in kvdeploy's.

They use the standard library and whatever the runtime holds, and answer with one JSON line.
"""
