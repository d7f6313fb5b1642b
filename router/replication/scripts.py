"""Lua scripts on a scope's registry, leases, fences and blocks.

Scripts touch keys of one hash tag only. A script that refuses returns a status: ``EPOCH``: the scope has
another epoch than the caller knows; ``LEASE``: another replica holds the engine's lease. Tokens are
microseconds of the server's clock, never lower than an earlier one, so that they keep rising even if the
server loses the last one.
"""

from __future__ import annotations

from kvatlas.router.replication.master import Script

_CREATE = """
local function create(p, w, epoch, home, nonce, ttl)
  redis.call('DEL', KEYS[1])
  redis.call('HSET', KEYS[1], 'schema', ARGV[1], 'p', p, 'w', w, 'epoch', epoch, 'home', home,
             'v', nonce, 'gens', '', 'used', '', 'codes', '0')
  redis.call('PEXPIRE', KEYS[1], ttl)
end
"""

OPEN = Script(
    _CREATE
    + """
-- scope; schema, partitions, code bytes, new epoch, identity of the servers, nonce, ttl ms
local s = redis.call('HMGET', KEYS[1], 'schema', 'p', 'w', 'epoch', 'home')
if s[1] and s[2] and s[3] and s[4] and s[5] then return s end
create(ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7])
return {ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]}
"""
)

REPLACE_SERVERS = Script(
    _CREATE
    + """
-- scope; schema, epoch known, home known, new epoch, new home, nonce, ttl ms
-- The servers are others than those the scope was written to: nothing written before counts. One server's
-- history is a prefix of what was written, so its generations can go on; a Cluster's parts may lack different
-- ends, so there everything starts again.
local s = redis.call('HMGET', KEYS[1], 'epoch', 'home', 'p', 'w', 'used')
if s[1] ~= ARGV[2] or s[2] ~= ARGV[3] then return 0 end
if s[3] ~= '1' then
  create(s[3], s[4], ARGV[4], ARGV[5], ARGV[6], ARGV[7])
  return 1
end
for _, field in ipairs(redis.call('HKEYS', KEYS[1])) do
  local kind = string.sub(field, 1, 2)
  if kind == 's:' or kind == 'a:' then redis.call('HDEL', KEYS[1], field) end
end
redis.call('HSET', KEYS[1], 'home', ARGV[5], 'v', ARGV[6], 'used', (string.gsub(s[5], '1', '0')))
return 1
"""
)

_HOLDS = """
local function holds(engine, token)
  local lease = redis.call('HGET', KEYS[2], engine)
  return lease and string.match(lease, '^(%d+)|') == token
end
"""

_NOW = """
local now = redis.call('TIME')
local us = now[1] * 1000000 + now[2]
local ms = math.floor(us / 1000)
"""

CLAIM = Script(
    _CREATE
    + _HOLDS
    + _NOW
    + """
-- scope, leases; schema, epoch, engine, token, nonce, slots max, epoch for a fresh start, ttl ms, lease ms
-- A new generation for the engine: in the slot it has, else in the lowest free one. A slot whose generations
-- are used up ('x') is never used again in this epoch.
local s = redis.call('HMGET', KEYS[1], 'epoch', 'gens', 'used', 'a:' .. ARGV[3], 'p', 'w', 'home')
if s[1] ~= ARGV[2] then return {'EPOCH'} end
if not redis.call('HGET', KEYS[2], ARGV[3]) then
  redis.call('HSET', KEYS[2], ARGV[3], string.format('%s|%.0f|', ARGV[4], ms + tonumber(ARGV[9])))
  redis.call('PEXPIRE', KEYS[2], ARGV[8])
end
if not holds(ARGV[3], ARGV[4]) then return {'LEASE'} end
local gens, used = s[2], s[3]
local function mark(text, at, char)
  return string.sub(text, 1, at) .. char .. string.sub(text, at + 2)
end
local at = s[4] and tonumber(s[4])
if at and string.byte(gens, at + 1) == 255 then
  used = mark(used, at, 'x')
  at = nil
end
if not at then
  local live = 0
  for i = 1, #used do
    local mine = string.sub(used, i, i)
    if mine == '1' then live = live + 1 end
    if not at and mine == '0' then
      if string.byte(gens, i) < 255 then at = i - 1 else used = mark(used, i - 1, 'x') end
    end
  end
  if not at then
    at = #used
    if at >= tonumber(ARGV[6]) or at >= math.max(128, 4 * live) then
      create(s[5], s[6], ARGV[7], s[7], ARGV[5], ARGV[8])
      return {'EPOCH'}
    end
    gens, used = gens .. string.char(0), used .. '0'
  end
end
local gen = string.byte(gens, at + 1) + 1
redis.call('HSET', KEYS[1], 'gens', mark(gens, at, string.char(gen)), 'used', mark(used, at, '1'),
           's:' .. ARGV[3], at .. ':' .. gen, 'a:' .. ARGV[3], at, 'v', ARGV[5])
return {'OK', at, gen}
"""
)

DESCRIBE = Script(
    _HOLDS
    + """
-- scope, leases; epoch, engine, token, description, nonce
if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then return 'EPOCH' end
if not holds(ARGV[2], ARGV[3]) then return 'LEASE' end
if redis.call('HGET', KEYS[1], 'e:' .. ARGV[2]) ~= ARGV[4] then
  redis.call('HSET', KEYS[1], 'e:' .. ARGV[2], ARGV[4], 'v', ARGV[5])
end
return 'OK'
"""
)

CODES = Script(
    """
-- scope; epoch, nonce, codes max, patterns...
-- One code per pattern, 0 where there is no room left.
local s = redis.call('HMGET', KEYS[1], 'epoch', 'codes')
if s[1] ~= ARGV[1] then return {'EPOCH'} end
local last, before, found = tonumber(s[2]), tonumber(s[2]), {'OK'}
for i = 4, #ARGV do
  local code = redis.call('HGET', KEYS[1], 'p:' .. ARGV[i])
  if not code and last < tonumber(ARGV[3]) then
    last = last + 1
    code = last
    redis.call('HSET', KEYS[1], 'p:' .. ARGV[i], code)
  end
  found[#found + 1] = tonumber(code or 0)
end
if last > before then redis.call('HSET', KEYS[1], 'codes', last, 'v', ARGV[2]) end
return found
"""
)

RETIRE = Script(
    _HOLDS
    + _NOW
    + """
-- scope, leases; epoch, engine, token ('' = if its lease ended long ago), nonce, long ago in ms
-- The engine left: its slot is free for another, under another generation. Its lease may go, once ended, as
-- tokens rise with the clock.
local s = redis.call('HMGET', KEYS[1], 'epoch', 'a:' .. ARGV[2], 'used')
if s[1] ~= ARGV[1] then return 'EPOCH' end
if ARGV[3] ~= '' then
  if not holds(ARGV[2], ARGV[3]) then return 'LEASE' end
else
  local lease = redis.call('HGET', KEYS[2], ARGV[2])
  local ends = lease and tonumber(string.match(lease, '^%d+|(%d+)|'))
  if ends and ends + tonumber(ARGV[5]) > ms then return 'LEASE' end
  redis.call('HDEL', KEYS[2], ARGV[2])
end
redis.call('HDEL', KEYS[1], 's:' .. ARGV[2], 'a:' .. ARGV[2], 'e:' .. ARGV[2])
if s[2] then
  local at = tonumber(s[2])
  redis.call('HSET', KEYS[1], 'used', string.sub(s[3], 1, at) .. '0' .. string.sub(s[3], at + 2))
end
redis.call('HSET', KEYS[1], 'v', ARGV[4])
return 'OK'
"""
)

INVALIDATE = Script(
    _HOLDS
    + """
-- scope, leases; engine, token
-- What is written of this engine must not be believed. Only deletes, which a full server allows too; readers
-- take a missing version for a changed one.
if redis.call('HGET', KEYS[2], ARGV[1]) and not holds(ARGV[1], ARGV[2]) then return 'LEASE' end
redis.call('HDEL', KEYS[1], 's:' .. ARGV[1], 'v')
return 'OK'
"""
)

ACQUIRE = Script(
    _NOW
    + """
-- leases; engine, replica, lease ms, token must be above, ttl ms
local lease = redis.call('HGET', KEYS[1], ARGV[1])
local token = math.max(us, tonumber(ARGV[4]) + 1)
if lease then
  local old, ends, holder = string.match(lease, '^(%d+)|(%d+)|(.*)$')
  -- Without a match no replica wrote it.
  if old and tonumber(ends) > ms and holder ~= ARGV[2] then return {0, holder, tonumber(ends) - ms} end
  if old then token = math.max(token, tonumber(old) + 1) end
end
local text = string.format('%.0f|%.0f|%s', token, ms + tonumber(ARGV[3]), ARGV[2])
redis.call('HSET', KEYS[1], ARGV[1], text)
redis.call('PEXPIRE', KEYS[1], ARGV[5])
return {token, ARGV[2], tonumber(ARGV[3])}
"""
)

RENEW = Script(
    _NOW
    + """
-- leases, scope; replica, lease ms, ttl ms, (engine, token)...
-- 1 for each lease still held: it may have expired unless another replica took it; one that the server
-- lost is taken again.
local held = {}
for i = 4, #ARGV, 2 do
  local lease = redis.call('HGET', KEYS[1], ARGV[i])
  local mine = not lease or string.match(lease, '^(%d+)|') == ARGV[i + 1]
  if mine then
    redis.call('HSET', KEYS[1], ARGV[i],
               string.format('%s|%.0f|%s', ARGV[i + 1], ms + tonumber(ARGV[2]), ARGV[1]))
  end
  held[#held + 1] = mine and 1 or 0
end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
return held
"""
)

RELEASE = Script(
    _NOW
    + """
-- leases; engine, token
-- The token stays, so that the next one is higher.
local lease = redis.call('HGET', KEYS[1], ARGV[1])
if not lease or string.match(lease, '^(%d+)|') ~= ARGV[2] then return 0 end
local holder = string.match(lease, '^%d+|%d+|(.*)$')
redis.call('HSET', KEYS[1], ARGV[1], string.format('%s|%.0f|%s', ARGV[2], ms, holder))
return 1
"""
)
