"""Container images built without a container engine, and the engine bundle that the local profile mounts."""
