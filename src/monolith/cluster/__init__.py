"""Cluster: how the processes of a run find each other, which of them are alive, and who may connect."""

from monolith.cluster.addresses import (
    Address,
    AddressFamily,
    NodeAliveChecker,
    check_port,
    concat_ip_and_port,
    get_local_host,
    get_local_ip,
    get_local_server_addr,
    is_ipv4_supported,
    is_ipv6_address,
    wait_for_port,
)
from monolith.cluster.consul import ConsulDiscovery
from monolith.cluster.consul_client import ConsulClient, ConsulConfig, ConsulService
from monolith.cluster.discovery import (
    DATA_DISPATCHER,
    Discovery,
    MemoryDiscovery,
    MemoryRegistry,
    Registration,
    locator,
)
from monolith.cluster.discovery_url import open_discovery_url
from monolith.cluster.files_discovery import FilesConfig, FilesDiscovery
from monolith.cluster.manager import (
    Cluster,
    ClusterManager,
    ClusterManagerConfig,
    OnWaiting,
    ProcessRole,
    Waiting,
    fetch_ps_cluster,
    save_ps_cluster,
)
from monolith.cluster.ray_discovery import RayDiscovery, RayDiscoveryConfig
from monolith.cluster.zookeeper import (
    ZooKeeperConfig,
    ZooKeeperDiscovery,
    clear_zk_path,
    default_zk_servers,
    get_zk_auth_data,
)

__all__ = [
    "DATA_DISPATCHER",
    "Address",
    "AddressFamily",
    "Cluster",
    "ClusterManager",
    "ClusterManagerConfig",
    "ConsulClient",
    "ConsulConfig",
    "ConsulDiscovery",
    "ConsulService",
    "Discovery",
    "FilesConfig",
    "FilesDiscovery",
    "MemoryDiscovery",
    "MemoryRegistry",
    "NodeAliveChecker",
    "OnWaiting",
    "ProcessRole",
    "RayDiscovery",
    "RayDiscoveryConfig",
    "Registration",
    "Waiting",
    "ZooKeeperConfig",
    "ZooKeeperDiscovery",
    "check_port",
    "clear_zk_path",
    "concat_ip_and_port",
    "default_zk_servers",
    "fetch_ps_cluster",
    "get_local_host",
    "get_local_ip",
    "get_local_server_addr",
    "get_zk_auth_data",
    "is_ipv4_supported",
    "is_ipv6_address",
    "locator",
    "open_discovery_url",
    "save_ps_cluster",
    "wait_for_port",
]
