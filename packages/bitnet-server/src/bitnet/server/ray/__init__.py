"""The server on a Ray cluster: its application as Serve's ingress, engines as replicas on the cluster's nodes."""
