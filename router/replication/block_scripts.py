"""Lua scripts that write blocks, with the fencing check that every writer must pass.

The fence of a partition holds, per engine, the token of the current writer and the number of its last
batch. Refusals: ``FENCED`` another writer has taken over, ``NOFENCE`` the fence was lost, ``LATE`` a
later batch was applied before.
"""

from __future__ import annotations

from kvatlas.router.replication.master import Script

FENCE = Script(
    """
-- fence; engine, token, ttl ms
-- Only upwards. The token that stands there: the caller's, or a higher one.
local fence = redis.call('HGET', KEYS[1], ARGV[1])
local stands = fence and string.match(fence, '^(%d+):')
if stands and tonumber(stands) > tonumber(ARGV[2]) then return tonumber(stands) end
if stands ~= ARGV[2] then redis.call('HSET', KEYS[1], ARGV[1], ARGV[2] .. ':0') end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return tonumber(ARGV[2])
"""
)

WRITE = Script(
    """
-- fence; engine, token, sequence number, key prefix, slot, bytes per slot, ttl ms, fence ttl ms, records
-- A record is 8 bytes of hash and the slot's new bytes; zeros take the engine's presence away. Returns
-- {word, blocks changed, blocks there was no room for}.
local fence = redis.call('HGET', KEYS[1], ARGV[1])
if not fence then return {'NOFENCE', 0, 0} end
local token, seq = string.match(fence, '^(%d+):(%d+)$')
if token ~= ARGV[2] then return {'FENCED', 0, 0} end
if tonumber(ARGV[3]) <= tonumber(seq) then return {'LATE', 0, 0} end
local mark = token .. ':' .. ARGV[3]
local kept = redis.pcall('HSET', KEYS[1], ARGV[1], mark)
local full = type(kept) == 'table' and kept.err ~= nil
if full and not string.find(kept.err, 'OOM', 1, true) then return redis.error_reply(kept.err) end
redis.call('PEXPIRE', KEYS[1], ARGV[8])
-- A full server refuses commands that may grow, but none after a script's first write. So from here on this
-- script itself sees to it that nothing grows: what has no room is refused, and what stood there goes.
if full then redis.call('HSET', KEYS[1], ARGV[1], mark) end
local call, sub, byte = redis.call, string.sub, string.byte
local prefix, ttl, records = ARGV[4], ARGV[7], ARGV[9]
local unit = tonumber(ARGV[6])
local from = tonumber(ARGV[5]) * unit
local till = from + unit
local zero, empty = string.rep('\\0', unit), string.rep('\\0', from)
local changed, refused = 0, 0
local size, step = 8 + unit, 128
for start = 1, #records, size * step do
  local keys, n = {}, 0
  for at = start, math.min(start + size * step, #records + 1) - 1, size do
    n = n + 1
    keys[n] = prefix .. sub(records, at, at + 7)
  end
  local values = call('MGET', unpack(keys, 1, n))
  for i = 1, n do
    local at = start + (i - 1) * size
    local new, old = sub(records, at + 8, at + 7 + unit), values[i]
    local was = old and sub(old, from + 1, till) or ''
    if #was < unit then was = was .. sub(zero, #was + 1) end
    if full and new ~= zero and new ~= was and (not old or #old < till) then
      new, refused = zero, refused + 1
    end
    if new ~= zero then
      if not old then old = empty
      elseif #old < from then old = old .. sub(empty, #old + 1) end
      if #old == from then old = old .. new
      else old = sub(old, 1, from) .. new .. sub(old, till + 1) end
      call('SET', keys[i], old, 'PX', ttl)
      changed = changed + 1
    elseif was ~= zero then
      local left = sub(old, 1, from) .. zero .. sub(old, till + 1)
      local last = #left
      while last > 0 and byte(left, last) == 0 do last = last - 1 end
      if last == 0 then call('DEL', keys[i])
      else call('SET', keys[i], sub(left, 1, last), 'KEEPTTL') end
      changed = changed + 1
    end
  end
end
return {'OK', changed, refused}
"""
)
