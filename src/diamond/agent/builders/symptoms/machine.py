"""The machine a build runs on, the base it starts from, and its way to the network."""

from __future__ import annotations

from diamond.agent.builders.symptoms.symptom import Symptom

_LOGIN = "compute nodes often have no way out: build on the login node with --where login"

_UNREACHABLE = (
    r"temporary failure (in name resolution|resolving).*",
    r"name or service not known",
    r"could ?n[o']t resolve( host| proxy)?:? .*",
    r"dial tcp: lookup .*",
    r"network is unreachable",
    r"no route to host",
    r"(failed to|could not|couldn't|unable to|cannot) connect to .*",
    r"connection (refused|timed out|reset by peer)",
    r"dial tcp .*(i/o timeout|refused)",
    r"failed to establish a new connection",
    r"get \"https?://[^\"]*\": (unexpected )?eof",
    r"nodename nor servname",
)

SYMPTOMS: dict[str, Symptom] = {
    # The machine.
    "user_namespaces": Symptom(
        patterns=(
            # What the kernel answers when the allowed number of user namespaces is 0; no disk is full.
            r"failed to create container process: no space left on device",
            r"failed to create (user|mount) namespace",
            r"can't init user\+mount namespaces",
            r"unshare: .*(operation not permitted|no space left on device)",
            r"(requires?|without|enable) unprivileged user namespaces?",
            r"cannot clone: (operation not permitted|invalid argument)",
            r"user namespaces? (is|are) (not enabled|disabled)",
        ),
        message="this machine does not let ordinary users make user namespaces, which the builder needs",
        hint="build elsewhere (--where batch or --where login), use the venv builder, or ask the site to allow "
        "unprivileged user namespaces",
        instead={
            "batch": "build on the login node (--where login), use the venv builder, or ask the site to allow "
            "unprivileged user namespaces on compute nodes"
        },
    ),
    "fakeroot_libc": Symptom(
        patterns=(r"version [`'](?P<what>GLIBC_[\d.]+)' not found \(required by .*(fakeroot|faked|libs)",),
        message="the base is older than this machine: its C library has no {what}, which the fakeroot here needs",
        hint="use a newer base, or ask the site for a range of user numbers in /etc/subuid, which replaces fakeroot",
    ),
    "fakeroot": Symptom(
        patterns=(
            r"no mapping entry found in /etc/sub[ug]id",
            r"could not use fakeroot",
            r"new[ug]idmap['\"]? .*(failed|not found|no such file)",
            r"insufficient UIDs or GIDs available in user namespace",
            r"are you root\?",
            r"requires superuser privilege",
            r"set(groups|euid|egid|resuid|resgid) \d+ failed",
            r"cpio: (ch|l)own",
            r"fakeroot(:| command)? not found",
        ),
        message="installing packages needs fakeroot or a range of user numbers, and this account has neither here",
        hint="ask the site to install the fakeroot program, or to give this account a range in /etc/subuid and "
        "/etc/subgid; or take a base that has these packages already and leave `system` empty",
    ),
    "quota": Symptom(
        patterns=(r"disk quota exceeded", r"errno 122\b"),
        message="the disk quota of this account is used up",
        hint="remove images and kept layers you do not need (diamond image prune), or have the agent keep images on a "
        "larger file system: image_root in its policy.toml",
    ),
    "disk_full": Symptom(
        patterns=(r"no space left on device", r"errno 28\b", r"not have enough free space in"),
        message="the disk is full where the build keeps its files",
        hint="remove images and kept layers you do not need (diamond image prune), or have the agent keep images on a "
        "larger file system: image_root in its policy.toml",
    ),
    "out_of_memory": Symptom(
        patterns=(
            r"killed signal terminated program (?P<what>\S+)",
            r"^(.*: line \d+: +)?\d* ?killed\b.*$",
            r"signal: killed",
            r"out of memory: killed process",
            r"oom[-_ ]kill",
            r"(cannot|can't|unable to) allocate (virtual )?memory",
            r"virtual memory exhausted",
            r"^\s*MemoryError",
            r"std::bad_alloc",
        ),
        message="the build ran out of memory",
        hint="build in a batch job (--where batch), or compile with fewer processes (MAX_JOBS=2, make -j2)",
        instead={"batch": "ask for more memory, or compile with fewer processes (MAX_JOBS=2, make -j2)"},
    ),
    # The base.
    "rate_limited": Symptom(
        patterns=(r"toomanyrequests", r"pull rate limit", r"429 too many requests"),
        message="the registry of the base answers no more for now: too many downloads from this address",
        hint="try again in an hour, log in to the registry on the endpoint, or use a base that lies there already",
    ),
    "unauthorized": Symptom(
        patterns=(
            r"unauthorized: (authentication required|.*)",
            r"requested access to the resource is denied",
            r"pull access denied",
            r"(401 unauthorized|denied: .*)",
            r"invalid username/password",
        ),
        message="the registry does not give out the base {base}: no such image, or one that needs a login",
        hint="check the spelling, or log in on the endpoint first (apptainer registry login, podman login)",
        stages=("base",),
    ),
    "base_architecture": Symptom(
        patterns=(
            r"no image found in (manifest list|image index) for architecture (?P<what>\S+)",
            r"no matching manifest for (?P<what>\S+)",
            r"exec format error",
            r"does not match (the )?(host|requested|expected) (architecture|platform)",
        ),
        message="the base {base} is not made for this machine's processors",
        hint="choose a base for them, or one that comes for several architectures",
    ),
    "base_not_found": Symptom(
        patterns=(
            r"manifest( for \S+)?( not found|:? unknown)",
            r"manifest_unknown",
            r"(name|repository)( name)? (unknown|not known to registry)",
            r"no such image",
            r"(image|sif|file|path) .*(does not exist|not found)",
            r"(no such file or directory|unable to open file|could not open image)",
        ),
        message="there is no base {base}",
        hint="check name and tag (docker://python:3.12-slim), or the path as it is on the endpoint",
        stages=("base",),
        after=1,
    ),
    # The way out.
    "certificate": Symptom(
        patterns=(
            r"certificate[_ ]verify[_ ]failed",
            r"x509: certificate .*",
            r"ssl certificate problem.*",
            r"error setting certificate (file|verify).*",
            r"(server )?certificate verification failed",
        ),
        message="a server's certificate is not trusted here: often a proxy of the site that looks into connections",
        hint="start the agent with SSL_CERT_FILE (and PIP_CERT) set to the site's own file of certificates",
    ),
    "proxy": Symptom(
        patterns=(r"407 proxy authentication required", r"tunnel connection failed.*", r"proxy connect aborted.*"),
        message="the proxy refused the connection",
        hint="check https_proxy in the agent's environment: some proxies want a password, or allow only some hosts",
    ),
    "index_timeout": Symptom(
        patterns=(
            r"read timed out",
            r"readtimeouterror",
            r"operation too slow",
            r"connection timed out after \d+",
            r"timeout was reached",
            r"TLS handshake timeout",
        ),
        message="a package index or registry did not answer in time",
        hint="try again: kept layers are not built again; PIP_DEFAULT_TIMEOUT in the agent's environment makes it wait",
    ),
    "registry_unreachable": Symptom(
        patterns=_UNREACHABLE,
        message="no network: the registry {registry} of the base {base} cannot be reached from where the build runs",
        hint="put the base on the endpoint (a .sif file, an archive of `podman save`, or a folder) and name its path "
        "as `base`, or give the agent the site's proxy (https_proxy)",
        instead={"batch": f"{_LOGIN}; or put the base on the endpoint and name its path as `base`"},
        stages=("base",),
    ),
    "no_network": Symptom(
        patterns=_UNREACHABLE,
        message="no network: {host} cannot be reached from where the build runs",
        hint="check that this machine may reach the Internet, or give the agent the site's proxy (https_proxy)",
        instead={"batch": _LOGIN},
    ),
}
