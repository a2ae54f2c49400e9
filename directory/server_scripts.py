"""What is kept on the server, and the scripts that read and change it in one piece each.

    {prefix}:v1:nodes         hash    "@epoch" → token of this data set: another one, data was lost
                                      "@version" → token of the last change to the list of nodes
                                      "=" + node id → registration (`Registration`)
    {prefix}:v1:generations   hash    node id → latest generation, and " left" if it deregistered
    {prefix}:v1:statuses      hash    node id → "generation:beat:written at:age then:NodeStatus"
    {prefix}:v1:sequences     hash    node id → "generation:base:last" of published block events
    {prefix}:v1:events        stream  of entries {"b": list of `NumberedBatch`}, bounded
    {prefix}:v1:owner         string  who controls the cluster; expires

The braces let a server that shards its keys keep those of one cluster together. Scripts run one
after the other, so a reader sees events and `sequences` of one instant: what has a number and is
not in the stream is lost. Times are in ms and the server's, whatever the hosts' clocks say.
"""

from __future__ import annotations

from dataclasses import dataclass

from directory.server_link import Command

_KEPT = ("nodes", "generations", "statuses", "sequences", "events")
MAX_GENERATIONS = 4096  # remembered of nodes that are gone

_NOW = """
local function now_ms()
  local time = redis.call('TIME')
  return string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
end
local nodes, generations, statuses, sequences, events = unpack(KEYS)
"""

# ARGV: node id, generation, registration, token, beat, retention in ms, most generations.
# Returns "ok", or the later generation that has the place.
_REGISTER = (
    _NOW
    + """
local id, generation, token = ARGV[1], ARGV[2], ARGV[4]
local known = string.match(redis.call('HGET', generations, id) or '', '^%d+')
if known and tonumber(known) > tonumber(generation) then return known end
if known ~= generation then redis.call('HDEL', sequences, id) end
local now = now_ms()
redis.call('HSET', generations, id, generation)
redis.call('HSETNX', nodes, '@epoch', token)
redis.call('HSET', nodes, '=' .. id, ARGV[3], '@version', token)
redis.call('HSET', statuses, id, table.concat({generation, ARGV[5], now, '0', ''}, ':'))
local all = redis.call('HGETALL', statuses)
for i = 1, #all, 2 do
  local written = tonumber(string.match(all[i + 1], '^[^:]*:[^:]*:(%d+)') or 0)
  if now - written > tonumber(ARGV[6]) then
    redis.call('HDEL', nodes, '=' .. all[i])
    redis.call('HDEL', statuses, all[i])
    redis.call('HDEL', sequences, all[i])
  end
end
if redis.call('HLEN', generations) > tonumber(ARGV[7]) then
  for _, other in ipairs(redis.call('HKEYS', generations)) do
    if redis.call('HEXISTS', nodes, '=' .. other) == 0 then
      redis.call('HDEL', generations, other)
    end
  end
end
return 'ok'
"""
)

# ARGV: node id, generation, beat or "", age in ms, status, base or "", last, most entries, entry...
# Returns "ok"; "lost": register again; "left": somebody deregistered it; or a later generation.
_WRITE = (
    _NOW
    + """
local id, generation = ARGV[1], ARGV[2]
local value = redis.call('HGET', generations, id) or ''
local known = string.match(value, '^%d+')
if not known or tonumber(known) < tonumber(generation) then return 'lost' end
if tonumber(known) > tonumber(generation) then return known end
if string.find(value, ' left', 1, true) then return 'left' end
if redis.call('HEXISTS', nodes, '=' .. id) == 0 then return 'lost' end
if redis.call('HEXISTS', nodes, '@epoch') == 0 then return 'lost' end
for i = 9, #ARGV do redis.call('XADD', events, 'MAXLEN', '~', ARGV[8], '*', 'b', ARGV[i]) end
if ARGV[3] ~= '' then
  local status = table.concat({generation, ARGV[3], now_ms(), ARGV[4], ARGV[5]}, ':')
  redis.call('HSET', statuses, id, status)
end
if ARGV[6] ~= '' then
  redis.call('HSET', sequences, id, table.concat({generation, ARGV[6], ARGV[7]}, ':'))
end
return 'ok'
"""
)

# ARGV: node id, generation, token.
_DEREGISTER = (
    _NOW
    + """
local id, generation = ARGV[1], ARGV[2]
local known = string.match(redis.call('HGET', generations, id) or '', '^%d+')
if known and tonumber(known) > tonumber(generation) then return known end
redis.call('HSET', generations, id, generation .. ' left')
redis.call('HDEL', nodes, '=' .. id)
redis.call('HDEL', statuses, id)
redis.call('HDEL', sequences, id)
redis.call('HSETNX', nodes, '@epoch', ARGV[3])
redis.call('HSET', nodes, '@version', ARGV[3])
return 'ok'
"""
)

# ARGV: version, id of the last entry read or "" to begin at the end, most entries, whether to
# read statuses, token. Returns epoch, version, time in ms, id of the newest entry, ids and
# payloads of entries, nodes and generations or nil if the version is the same, and statuses and
# sequences or nil.
_READ = (
    _NOW
    + """
local epoch = redis.call('HGET', nodes, '@epoch')
if not epoch then
  epoch = ARGV[5]
  redis.call('HSET', nodes, '@epoch', epoch, '@version', epoch)
end
local version = redis.call('HGET', nodes, '@version')
local tail = redis.call('XREVRANGE', events, '+', '-', 'COUNT', 1)
local newest = tail[1] and tail[1][1] or '0-0'
local entries = {}
if ARGV[2] ~= '' then
  for _, entry in ipairs(redis.call('XRANGE', events, '(' .. ARGV[2], '+', 'COUNT', ARGV[3])) do
    entries[#entries + 1] = entry[1]
    entries[#entries + 1] = entry[2][2]
  end
end
local changed = version ~= ARGV[1]
local full = ARGV[4] == '1'
return {
  epoch, version, now_ms(), newest, entries,
  changed and redis.call('HGETALL', nodes), changed and redis.call('HGETALL', generations),
  full and redis.call('HGETALL', statuses), full and redis.call('HGETALL', sequences),
}
"""
)

# ARGV: who, for how long in ms. Returns whose it is and for how long, in ms.
_CLAIM = """
local holder = redis.call('GET', KEYS[1])
if not holder or holder == ARGV[1] then
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
  return {ARGV[1], tonumber(ARGV[2])}
end
return {holder, redis.call('PTTL', KEYS[1])}
"""

# ARGV: who.
_RELEASE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
return 'ok'
"""


@dataclass(frozen=True)
class ServerScripts:
    """Makes the commands for one cluster.

    The scripts travel with each call: 20 KB/s that need no second path for a server that has
    forgotten them.
    """

    key_prefix: str
    retention_s: float
    max_stream_entries: int

    def register(
        self, node_id: str, generation: int, registration: bytes, *, token: str, beat: str
    ) -> Command:
        retention_ms = int(self.retention_s * 1000)
        return self._eval(
            _REGISTER,
            node_id,
            generation,
            registration,
            token,
            beat,
            retention_ms,
            MAX_GENERATIONS,
        )

    def write(
        self,
        node_id: str,
        generation: int,
        *,
        beat: str,
        age_ms: int,
        status: bytes,
        base: int | None,
        last: int | None,
        entries: list[bytes],
    ) -> Command:
        span = ("", "") if base is None or last is None else (base, last)
        return self._eval(
            _WRITE,
            node_id,
            generation,
            beat,
            age_ms,
            status,
            *span,
            self.max_stream_entries,
            *entries,
        )

    def deregister(self, node_id: str, generation: int, *, token: str) -> Command:
        return self._eval(_DEREGISTER, node_id, generation, token)

    def read(
        self, *, version: str, cursor: str, max_entries: int, full: bool, token: str
    ) -> Command:
        return self._eval(_READ, version, cursor, max_entries, int(full), token)

    def claim(self, owner: str, ttl_s: float) -> Command:
        return ("EVAL", _CLAIM, 1, self._key("owner"), owner, max(1, int(ttl_s * 1000)))

    def release(self, owner: str) -> Command:
        return ("EVAL", _RELEASE, 1, self._key("owner"), owner)

    def _eval(self, script: str, *arguments: str | bytes | int) -> Command:
        return ("EVAL", script, len(_KEPT), *map(self._key, _KEPT), *arguments)

    def _key(self, name: str) -> str:
        return f"{{{self.key_prefix}}}:v1:{name}"
