-- Takes entries away from a worker that is gone and tells the machine: each becomes a delivery_lost in the results.
-- Liveness is looked at in the same script that takes the entry away; entries leave the pending list, so no cursor is kept.
--
-- KEYS   1 task stream, 2 results stream of the partition, 3 the liveness key of the owner
-- ARGV   group, consumer, least idle time in ms, most entries to take, '1' to delete the consumer once it holds nothing
-- Returns  the number of deliveries found lost, -1 where the owner is alive
local call, queue, group, consumer = redis.call, KEYS[1], ARGV[1], ARGV[2]
if call('EXISTS', KEYS[3]) == 1 then return -1 end
local pending = call('XPENDING', queue, group, 'IDLE', ARGV[3], '-', '+', ARGV[4], consumer)
local lost = 0
for _, entry in ipairs(pending) do
  local found = call('XRANGE', queue, entry[1], entry[1])
  if call('XACK', queue, group, entry[1]) == 1 and #found > 0 then
    local fields, body = found[1][2], ''
    for i = 1, #fields, 2 do
      if fields[i] == 'd' then body = fields[i + 1] end
    end
    call('XDEL', queue, entry[1])
    call('XADD', KEYS[2], '*', 't', 'delivery_lost', 'd', body)
    lost = lost + 1
  end
end
if #pending == 0 and ARGV[5] == '1' and #call('XPENDING', queue, group, '-', '+', 1, consumer) == 0 then
  call('XGROUP', 'DELCONSUMER', queue, group, consumer)
end
return lost
