"""Ray reads its variables at its first import, which is that of a test module here."""

from cepo.runtime.network import prepare_own_cluster

prepare_own_cluster()
