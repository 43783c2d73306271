"""Training on several machines: files with which SLURM, Kubernetes and Ray start the
processes. See README.md here.
"""
