"""Training on several machines: what SLURM, Kubernetes and Ray need to start the
processes; see README.md here.
"""
