"""Classes of your own: containers and tensor subclasses that copies take apart and rebuild."""

from tdcopier._containers.registry import register, register_tensor_subclass, unregister
from tdcopier._containers.unknown import UnknownTypeWarning

__all__ = ["UnknownTypeWarning", "register", "register_tensor_subclass", "unregister"]
