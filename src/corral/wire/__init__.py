"""How the control plane and a node speak over a socket: values as bytes, frames on a connection, what the node port can be asked."""
